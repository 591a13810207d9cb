/* Counters of the process in memory that the server can read. Counting there takes no longer than elsewhere, and a
 * question to the server costs the program nothing. */
#include "objects.h"

#include <sys/mman.h>
#include <unistd.h>

static struct shared_counters *shared; /* with rdmacm_enter(); NULL: the server has none */

void counters_start(struct rdmacm_wire *wire) {
    struct call call = {.type = RUN_COUNTERS, .sent_fd = -1};
    int code = control_call(&call);
    void *mapped = MAP_FAILED;
    if (!code && call.fds_count == 1)
        mapped = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, call.fds[0], 0);
    while (call.fds_count)
        close(call.fds[--call.fds_count]);
    if (mapped == MAP_FAILED)
        return;
    shared = mapped;
    wire->tally = &shared->tally;
}

/* The parent's stay mapped: its objects refer to them. */
void counters_forget(void) { shared = NULL; }

struct device_counters *counters_of(uint32_t index) {
    for (size_t i = 0; shared && i < MOST_COUNTED_DEVICES; i++) {
        struct device_counters *row = &shared->devices[i];
        if (!row->index)
            row->index = index;
        if (row->index == index)
            return row;
    }
    return NULL;
}
