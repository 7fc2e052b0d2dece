"""Reading and writing blocks of pool nodes, and clients that choose the node."""
