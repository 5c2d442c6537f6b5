"""How values move between stages: one file per transport."""
