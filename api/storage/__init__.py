"""Storage of clients' objects: files, batch records, responses."""
