"""The gateway: the endpoints of OpenAI and Anthropic, in front of the upstreams that answer."""
