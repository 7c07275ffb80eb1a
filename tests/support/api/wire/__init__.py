"""Raw connections: requests and answers of HTTP/1.1 as bytes."""
