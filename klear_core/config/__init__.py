"""All settings of Klear: frozen pydantic models that import nothing heavy."""
