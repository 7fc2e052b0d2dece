"""Between the APIs and the calls: requests become one internal request and a call, answers become
each API's own objects.
"""
