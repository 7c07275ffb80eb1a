"""JSON Schema: documents, keywords, static limits, and the analysis of what a schema permits."""
