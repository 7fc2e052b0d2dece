"""Translates between the APIs and the calls: requests become one internal request and a call, and
answers become each API's own objects.
"""
