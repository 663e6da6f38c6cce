"""The sample plane without IO: bytes to messages and back, and who may say what when."""
