#!/usr/bin/env python3
"""Lets TCP over IPv4 hand a network device packets of more than 64 KB (BIG TCP; Linux 6.3 and newer, root).

It does what `ip link set dev DEVICE gso_ipv4_max_size BYTES gro_ipv4_max_size BYTES` of iproute2 6.3 and newer does.

  ip netns exec NAMESPACE benchmarks/long_packets.py DEVICE BYTES
"""
import argparse
import os
import socket
import struct
import sys

from common import count

# linux/rtnetlink.h, linux/netlink.h, linux/if_link.h
RTM_NEWLINK = 16
NLM_F_REQUEST, NLM_F_ACK = 1, 4
IFLA_GSO_IPV4_MAX_SIZE, IFLA_GRO_IPV4_MAX_SIZE = 63, 64


def longest_packet(device, size):
    """Sets the size of packets in bytes. Raises OSError if the kernel refuses it."""
    header = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, socket.if_nametoindex(device), 0, 0)
    settings = b"".join(struct.pack("=HHI", 8, name, size) for name in (IFLA_GSO_IPV4_MAX_SIZE, IFLA_GRO_IPV4_MAX_SIZE))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.sendall(struct.pack("=IHHII", 16 + len(header) + len(settings), RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, 1, 0)
                       + header + settings)  # fmt: skip
        (error,) = struct.unpack_from("=i", kernel.recv(4096), 16)  # of the acknowledgment, after its header
    if error:
        raise OSError(-error, os.strerror(-error))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help="as of `ip link`")
    parser.add_argument("bytes", type=count(), metavar="BYTES", help="of the longest packet, its headers included")
    options = parser.parse_args()
    try:
        longest_packet(options.device, options.bytes)
    except (OSError, struct.error) as error:
        sys.exit(f"long_packets.py: {options.device}, {options.bytes} bytes: {getattr(error, 'strerror', None) or error}")


if __name__ == "__main__":
    main()
