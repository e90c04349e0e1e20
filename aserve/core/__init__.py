"""The pure heart: states, queues, the KV ledger and the scheduler. No await, clock, I/O, log or torch."""
