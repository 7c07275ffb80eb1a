"""Protocol: request bodies as pydantic models with strict types. Each known field is supported, ignored or refused."""
