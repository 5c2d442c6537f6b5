"""ALL AT ONCE: a model and a cluster -> stages on sub-meshes, with their sharding (Alpa)."""
