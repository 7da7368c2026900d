"""The endpoint picker: gateways of Kubernetes' Gateway API ask the router which server each request should go to."""
