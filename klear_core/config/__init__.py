"""Define all settings of Klear as frozen pydantic models; importing them loads no heavy library."""
