"""Past days of an inference service under Clover and the schemes it is compared with."""
