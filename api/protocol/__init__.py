"""Request bodies as pydantic models: strict types; every known field is supported, ignored or refused by name."""
