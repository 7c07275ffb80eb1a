"""Files and batches of clients: what is stored of them, and how batches are answered."""
