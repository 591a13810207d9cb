"""A machine with the kernel's RDMA stack, for tests: QEMU, Debian's kernel, a root made of Debian's packages.

Nothing of it needs root or a kernel module here, and nothing it does reaches this machine but files of the folder it
shares.
"""
