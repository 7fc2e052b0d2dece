"""The scheduler: admits requests, places them on workers, and delivers their outputs."""
