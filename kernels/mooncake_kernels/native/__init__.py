"""C++ for what torch has no single call for: compiled where a compiler is, once, and kept."""
