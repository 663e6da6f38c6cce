"""TLS over sockets: what needs certificates, a handshake, and a paced stream of records."""
