/* The engine of streams, core/library/rs_stream.c, as a library that Python drives. */
#include "rs_stream.c"

/* One end: its private data and those of the peer, its memory, and what takes its requests; NULL: not understood. */
struct rs_stream *make(const uint8_t *own, const uint8_t *peer, uint8_t *control, uint8_t *sending, size_t send_size,
                       uint8_t *receiving, size_t receive_size, uint32_t slots,
                       void (*post_work)(void *, const struct rs_work *)) {
    struct rs_stream *stream = calloc(1, sizeof *stream);
    stream->control = control;
    stream->sending = sending;
    stream->send_size = send_size;
    stream->receiving = receiving;
    stream->receive_size = receive_size;
    stream->post = post_work;
    if (!rs_unpack_connection(own, RS_CONNECTION_LENGTH, &stream->own) ||
        !rs_unpack_connection(peer, RS_CONNECTION_LENGTH, &stream->peer) || !rs_stream_init(stream, slots)) {
        free(stream);
        return NULL;
    }
    rs_stream_start(stream);
    return stream;
}

void destroy(struct rs_stream *stream) {
    rs_stream_free(stream);
    free(stream);
}

int state_of(const struct rs_stream *stream) { return stream->state; }
int fault_of(const struct rs_stream *stream) { return stream->fault; }
size_t unread_in(const struct rs_stream *stream) { return rs_stream_unread(stream); }
bool is_idle(const struct rs_stream *stream) { return rs_stream_is_idle(stream); }

bool map(struct rs_stream *stream, uint64_t offset, uint64_t address, uint32_t key, uint32_t length) {
    return rs_stream_map(stream, 0, &(struct rs_mapping){offset, address, key, length});
}

bool pack_again(const uint8_t *from, size_t length, uint8_t *to) {
    struct rs_connection_data data;
    if (!rs_unpack_connection(from, length, &data))
        return false;
    rs_pack_connection(to, &data);
    return true;
}
