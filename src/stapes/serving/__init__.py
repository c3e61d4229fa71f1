"""The server: HTTP in OpenAI's shape, live sessions over WebSocket, a page."""
