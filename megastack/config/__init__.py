"""The configuration: typed schema, legality rules, composition with Hydra."""
