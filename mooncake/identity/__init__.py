"""The identity of a process: credentials, the roles they give, and how they are proven."""
