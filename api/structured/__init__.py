"""Output formats: the grammar of an answer, from any field or from tools, and the check of what came."""
