"""How payloads travel: communicators, the exchange, the cross-device ops and the strategy."""
