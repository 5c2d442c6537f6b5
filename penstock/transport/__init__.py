"""Messages between stages: one file per transport."""
