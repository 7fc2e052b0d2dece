"""C++ for operations that torch has no single call for. It is compiled once where there is a
compiler, and kept.
"""
