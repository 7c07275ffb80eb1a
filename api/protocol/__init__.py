"""The shapes of requests and answers, strict in types and complete in names."""
