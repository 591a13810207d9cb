/* Preloaded into librdmacm's mckey.
 *
 * mckey leaves the group and destroys its queue pairs as soon as it has posted its sends, and what rdma_rxe has not sent
 * by then is lost. Here it leaves the group at the end of its standard input, which the test decides. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

int rdma_leave_multicast(void *id, void *address)
{
    int (*original)(void *, void *) = dlsym(RTLD_NEXT, "rdma_leave_multicast");
    char byte;

    while (read(STDIN_FILENO, &byte, 1) > 0)
        ;
    return original(id, address);
}
