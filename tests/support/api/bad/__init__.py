"""Wrong request bodies: fields, numbers and structured forms, each with the error that it gets."""
