"""An API server in front of other people's engines: it places requests and passes answers on."""
