"""What `RedisTensorDict` is made of: indices, structure, and reading and writing in place on either layout."""
