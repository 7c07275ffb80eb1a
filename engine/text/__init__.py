"""Text processing: tokenizers, chat templates, incremental detokenization and stop strings. Imports no torch."""
