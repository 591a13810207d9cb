/* Glue: work requests that are posted directly, as the user has made them.
 *
 * A request that the core does not take is left to Python, which also finds out what is wrong with it.
 */
#include "module.h"

#include <string.h>

static PyObject *send_wr_class, *recv_wr_class, *sge_class, *mr_class;

enum { WR_SG, WR_ID, RECV_WR_FIELDS, WR_OPCODE = RECV_WR_FIELDS, WR_SEND_FLAGS, SEND_WR_FIELDS };
static const char *const wr_names[SEND_WR_FIELDS] = {"sg", "wr_id", "opcode", "send_flags"};
static PyObject *recv_wr_slots[RECV_WR_FIELDS], *send_wr_slots[SEND_WR_FIELDS];

enum { SGE_ADDR, SGE_LENGTH, SGE_LKEY, SGE_FIELDS };
static const char *const sge_names[SGE_FIELDS] = {"addr", "length", "lkey"};
static PyObject *sge_slots[SGE_FIELDS];

/* -- parsing --------------------------------------------------------------------------------------------------------- */

bool number_of(PyObject *value, uint64_t most, uint64_t *number) {
    if (!PyLong_Check(value))
        return false;
    int overflow;
    long long found = PyLong_AsLongLongAndOverflow(value, &overflow); /* faster than the unsigned one */
    if (!overflow) {
        *number = (uint64_t)found;
        return found >= 0 && *number <= most;
    }
    *number = PyLong_AsUnsignedLongLong(value);
    return *number <= most && !(*number == UINT64_MAX && PyErr_Occurred());
}

bool read_number(PyObject *object, PyObject *name, uint64_t most, uint64_t *number) {
    PyObject *value = PyObject_GetAttr(object, name);
    bool is_right = value && number_of(value, most, number);
    Py_XDECREF(value);
    return is_right;
}

bool read_uint32(PyObject *object, PyObject *name, uint32_t most, uint32_t *number) {
    uint64_t found = 0;
    bool is_right = read_number(object, name, most, &found);
    *number = (uint32_t)found;
    return is_right;
}

bool read_truth(PyObject *object, PyObject *name, bool *truth) {
    PyObject *value = PyObject_GetAttr(object, name);
    int found = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    *truth = found > 0;
    return found >= 0;
}

/* The value of an attribute by its slot. */
static PyObject *value_of(PyObject *object, PyObject *slot) {
    return get_slot(slot, object, (PyObject *)Py_TYPE(object));
}

static bool read_slot(PyObject *object, PyObject *slot, uint64_t most, uint64_t *number) {
    PyObject *value = value_of(object, slot);
    bool is_right = value && number_of(value, most, number);
    Py_XDECREF(value);
    return is_right;
}

static bool local_of_sge(PyObject *sge, struct local *local) {
    return read_slot(sge, sge_slots[SGE_LENGTH], RDMACM_LONGEST_MESSAGE, &local->length) &&
           read_slot(sge, sge_slots[SGE_ADDR], UINT64_MAX, &local->address) &&
           read_slot(sge, sge_slots[SGE_LKEY], UINT32_MAX, &local->lkey);
}

bool local_of_region(PyObject *region, PyObject *offset, PyObject *length, struct local *local) {
    uint64_t start, whole;
    if ((PyObject *)Py_TYPE(region) != mr_class)
        return false;
    PyObject *closed = PyObject_GetAttr(region, names._closed);
    Py_XDECREF(closed);
    if (closed != Py_False || !number_of(offset, RDMACM_LONGEST_MESSAGE, &start) ||
        !read_number(region, names.length, UINT64_MAX, &whole) ||
        !read_number(region, names.addr, UINT64_MAX, &local->address) ||
        !read_number(region, names.lkey, UINT32_MAX, &local->lkey) || start > whole)
        return false;
    local->length = whole - start;
    local->address += start;
    return length == Py_None || number_of(length, local->length, &local->length);
}

/* Take the next element of a list or tuple. */
static bool parse_element(PyObject *sg, Py_ssize_t index, bool is_list, struct request *request, bool may_be_bytes) {
    PyObject *element = Py_XNewRef(is_list ? PyList_GetItem(sg, index) : PyTuple_GetItem(sg, index));
    struct local *local = &request->locals[request->count];
    if (!element)
        return false;
    request->elements[request->count++] = element;
    local->bytes = NULL;
    if ((PyObject *)Py_TYPE(element) == sge_class)
        return local_of_sge(element, local);
    local->bytes = element;
    return may_be_bytes && PyBytes_CheckExact(element);
}

/* Its elements and its number. */
static bool parse(PyObject *object, PyObject *const *slots, struct request *request, bool may_be_bytes) {
    PyObject *sg = value_of(object, slots[WR_SG]);
    bool is_list = sg && PyList_CheckExact(sg), is_right = is_list || (sg && PyTuple_CheckExact(sg));
    Py_ssize_t count = !is_right ? 0 : is_list ? PyList_Size(sg) : PyTuple_Size(sg);
    is_right = is_right && count <= RDMACM_MOST_ELEMENTS;
    for (Py_ssize_t i = 0; is_right && i < count; i++)
        is_right = parse_element(sg, i, is_list, request, may_be_bytes);
    Py_XDECREF(sg);
    request->wr_id = is_right ? value_of(object, slots[WR_ID]) : NULL;
    return request->wr_id && PyLong_CheckExact(request->wr_id);
}

bool parse_send(PyObject *object, struct request *request) {
    request->count = 0;
    request->wr_id = NULL;
    return (PyObject *)Py_TYPE(object) == send_wr_class &&
           read_slot(object, send_wr_slots[WR_OPCODE], UINT32_MAX, &request->opcode) &&
           read_slot(object, send_wr_slots[WR_SEND_FLAGS], UINT32_MAX, &request->flags) &&
           parse(object, send_wr_slots, request, true);
}

bool parse_recv(PyObject *object, struct request *request) {
    request->count = 0;
    request->wr_id = NULL;
    return (PyObject *)Py_TYPE(object) == recv_wr_class && parse(object, recv_wr_slots, request, false);
}

void end_request(struct request *request) {
    Py_XDECREF(request->wr_id);
    while (request->count)
        Py_DECREF(request->elements[--request->count]);
}

bool read_fields(PyObject *object, PyObject *imm, bool is_xrc, struct rdmacm_send *send) {
    const struct rdmacm_request_type *type = &rdmacm_request_types[send->opcode];
    PyObject *word = type->word_kind == RDMACM_IMMEDIATE ? imm : names.invalidate_rkey;
    if (type->word_kind && !read_uint32(object, word, UINT32_MAX, &send->word))
        return false;
    if (is_xrc && !read_uint32(object, names.remote_srqn, RDMACM_QPN_MASK, &send->remote_srqn))
        return false;
    if (type->flags == RDMACM_IS_DATA || type->flags == RDMACM_IS_LOCAL)
        return true;
    bool is_atomic = type->flags & RDMACM_IS_ATOMIC;
    return read_number(object, names.remote_addr, UINT64_MAX, &send->remote_addr) &&
           read_uint32(object, names.rkey, UINT32_MAX, &send->rkey) &&
           (!is_atomic || (read_number(object, names.compare_add, UINT64_MAX, &send->compare_add) &&
                           read_number(object, names.swap, UINT64_MAX, &send->swap)));
}

bool parse_flags(const struct rules *rules, uint64_t flags, size_t elements, bool *solicited, bool *unsignaled) {
    *solicited = flags & RDMACM_FLAG_SOLICITED;
    *unsignaled = !(flags & RDMACM_FLAG_SIGNALED || rules->signals_all);
    return !(flags & ~(uint64_t)(RDMACM_FLAG_SIGNALED | RDMACM_FLAG_SOLICITED | RDMACM_FLAG_INLINE)) &&
           elements <= rules->max_send_sge;
}

/* -- memory ---------------------------------------------------------------------------------------------------------- */

/* Find the bytes of an element; false where key, range or permission is wrong. `region` is NULL if it has none. */
static bool find_memory(const struct rules *rules, const struct local *local, uint32_t access, uint8_t **data,
                        struct pin **region) {
    *data = NULL;
    *region = NULL;
    if (!local->length)
        return true;
    void *pin = NULL;
    *data = rdmacm_regions_find(rules->regions, rules->pd, (uint32_t)local->lkey, local->address, local->length,
                                access, &pin);
    *region = pin;
    return *data != NULL;
}

/* Add the memory of elements to a pin. False where the core does not take it. */
static bool pin_elements(struct pin *pin, const struct rules *rules, const struct local *locals, size_t count,
                         uint32_t access) {
    for (size_t i = 0; i < count; i++) {
        uint8_t *data;
        struct pin *region;
        if (locals[i].bytes || !find_memory(rules, &locals[i], access, &data, &region))
            return false;
        if (region)
            pin_region(pin, region, data, (uint32_t)locals[i].length, (uint32_t)locals[i].lkey);
    }
    return pin->memory.length <= RDMACM_LONGEST_MESSAGE;
}

/* The inline bytes of elements, copied; those of one element that cannot change are shared. NULL where the core does not
 * take it. */
static PyObject *inline_bytes(const struct rules *rules, const struct local *locals, size_t count) {
    const char *data[RDMACM_MOST_ELEMENTS];
    size_t lengths[RDMACM_MOST_ELEMENTS], total = 0;
    for (size_t i = 0; i < count; i++) {
        struct pin *region;
        uint8_t *found;
        if (locals[i].bytes) {
            data[i] = PyBytes_AsString(locals[i].bytes);
            lengths[i] = (size_t)PyBytes_Size(locals[i].bytes);
        } else if (find_memory(rules, &locals[i], 0, &found, &region)) {
            data[i] = (const char *)found;
            lengths[i] = (size_t)locals[i].length;
        } else {
            return NULL;
        }
        total += lengths[i];
    }
    if (total > rules->max_inline)
        return NULL;
    if (count == 1 && locals->bytes)
        return Py_NewRef(locals->bytes);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
    char *to = bytes ? PyBytes_AsString(bytes) : NULL;
    for (size_t i = 0; to && i < count; to += lengths[i++])
        if (lengths[i])
            memcpy(to, data[i], lengths[i]);
    return bytes;
}

struct pin *pin_data(const struct rules *rules, PyObject *wr_id, const struct local *locals, size_t count,
                     uint64_t flags, bool is_written) {
    bool is_inline = flags & RDMACM_FLAG_INLINE && count, done;
    PyObject *bytes = is_inline ? inline_bytes(rules, locals, count) : NULL;
    struct pin *pin = is_inline && !bytes ? NULL : make_pin(NULL, is_inline ? 1 : count);
    if (pin) {
        pin->wr_id = Py_NewRef(wr_id);
        done = is_inline ? pin_buffer(pin, bytes, PyBUF_SIMPLE)
                         : pin_elements(pin, rules, locals, count, is_written ? RDMACM_ACCESS_LOCAL_WRITE : 0);
        if (!keep_pin(pin, done))
            pin = NULL;
    }
    Py_XDECREF(bytes);
    return pin;
}

struct pin *pin_receive(const struct rules *rules, PyObject *wr_id, const struct local *locals, size_t count) {
    struct pin *pin = count <= rules->max_recv_sge ? make_pin(NULL, count) : NULL;
    if (!pin)
        return NULL;
    pin->wr_id = Py_NewRef(wr_id);
    return keep_pin(pin, pin_elements(pin, rules, locals, count, RDMACM_ACCESS_LOCAL_WRITE)) ? pin : NULL;
}

/* -- lists ----------------------------------------------------------------------------------------------------------- */

Py_ssize_t post_all(void *self, PyObject *requests, bool (*post)(void *, PyObject *)) {
    if (!PyList_CheckExact(requests))
        return post(self, requests);
    Py_ssize_t done = 0;
    for (; done < PyList_Size(requests); done++) {
        PyObject *request = Py_XNewRef(PyList_GetItem(requests, done));
        bool is_posted = request && post(self, request);
        Py_XDECREF(request);
        if (!is_posted)
            break;
    }
    return done;
}

PyObject *rest_of(PyObject *requests, Py_ssize_t done) {
    if (!done)
        return Py_NewRef(requests);
    if (!PyList_CheckExact(requests) || done >= PyList_Size(requests))
        Py_RETURN_NONE;
    return PyList_GetSlice(requests, done, PyList_Size(requests));
}

PyObject *configure_requests(PyObject *Py_UNUSED(module), PyObject *args) {
    if (PyTuple_Size(args) == 6 &&
        (!find_slots(PyTuple_GetItem(args, 0), wr_names, SEND_WR_FIELDS, send_wr_slots) ||
         !find_slots(PyTuple_GetItem(args, 1), wr_names, RECV_WR_FIELDS, recv_wr_slots) ||
         !find_slots(PyTuple_GetItem(args, 2), sge_names, SGE_FIELDS, sge_slots)))
        return NULL;
    return set_objects(args, 6, &send_wr_class, &recv_wr_class, &sge_class, &mr_class, &ah_class, &unsignaled_class);
}
