"""The configuration: typed schema, validation rules, composition with Hydra."""
