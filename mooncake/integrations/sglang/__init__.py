"""A storage backend of SGLang's HiCache: several SGLang servers share prefixes through a Mooncake
pool. `backend` is the only module that imports SGLang, and SGLang imports `backend`.
"""
