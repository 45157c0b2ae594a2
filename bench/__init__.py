"""The bench: what the gateway costs and how it behaves under load, beside nginx.

Nothing here is imported by the package. The engine and the load client are small
C programs (`native/`), compiled on demand, so that what is measured is the proxy.
"""
