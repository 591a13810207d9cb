"""RoCEv2 packets: opcodes, headers, packet sequence numbers and the invariant CRC."""
