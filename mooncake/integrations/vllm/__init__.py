"""A KV connector for vLLM: several vLLM servers share prefixes through a Mooncake pool. `connector`
is the only module that imports vLLM, and vLLM imports `connector`.
"""
