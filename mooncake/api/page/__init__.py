"""The web page's files, served by `mooncake.api.routes.page`: plain HTML, CSS and ES modules."""
