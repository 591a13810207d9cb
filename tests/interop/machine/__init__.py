"""Machines with the kernel's RDMA stack, for tests: Linux in user mode, and QEMU with Debian's own kernel.

Both have the same root directory, made of Debian's packages, and run bash scripts with the functions of ``net.sh``.
Neither needs root or a kernel module on the host, or changes any of the host's files beside those of the shared folder.
"""
