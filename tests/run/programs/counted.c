/* A program whose counters are looked at: it sends a message, and one that its peer has no receive for until a line
 * arrives. It prints "sent" before that, and "done". */
#include "pair.h"

static void receive(struct pair *pair) {
    struct ibv_sge part = {(uintptr_t)pair->memory, SIZE, pair->mr->lkey};
    struct ibv_recv_wr wr = {.sg_list = &part, .num_sge = 1}, *bad;
    CHECK(!ibv_post_recv(pair->qps[1], &wr, &bad));
}

static void send(struct pair *pair) {
    struct ibv_sge part = {(uintptr_t)pair->memory, SIZE / 2, pair->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &part, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
    CHECK(!ibv_post_send(pair->qps[0], &wr, &bad));
}

/* Of a receive and a send. */
static void complete(struct pair *pair) {
    for (int left = 2; left;) {
        struct ibv_wc wc;
        int found = ibv_poll_cq(pair->cq, 1, &wc);
        CHECK(found >= 0 && (!found || wc.status == IBV_WC_SUCCESS));
        left -= found;
    }
}

int main(void) {
    char line[16];
    struct pair pair = make_pair(open_first());
    receive(&pair);
    send(&pair);
    complete(&pair);
    send(&pair);
    puts("sent");
    fflush(stdout);
    CHECK(fgets(line, sizeof line, stdin));
    receive(&pair);
    complete(&pair);
    puts("done");
    return 0;
}
