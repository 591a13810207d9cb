/* What programs of sockets check; a failure ends the program. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(is_right)                                                                                                \
    do {                                                                                                               \
        if (!(is_right)) {                                                                                             \
            fprintf(stderr, "%s:%d: %s: %m\n", __FILE__, __LINE__, #is_right);                                         \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define FAILS(call, code) CHECK((call) == -1 && errno == (code))
