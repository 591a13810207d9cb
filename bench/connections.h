/* What the programs share that open and close connections as peers of peers.py: times and their output. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Connections under way at once, as AT_ONCE in peers.py. */
#define AT_ONCE 64

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static _Noreturn void fail(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static int compare_times(const void *one, const void *other) {
    double left = *(const double *)one, right = *(const double *)other;
    return (left > right) - (left < right);
}

/* Prints the figures as JSON: times of connections one after the other, in seconds, and the rate with AT_ONCE. */
static void print_figures(double *times, size_t count, double at_once) {
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += times[i];
    qsort(times, count, sizeof *times, compare_times);
    printf("{\"connections\": {\"per_second\": %.1f, \"p50_us\": %.2f, \"p99_us\": %.2f}, \"connections_at_once\": %.1f}\n",
           (double)count / sum, times[count / 2] * 1e6, times[count * 99 / 100] * 1e6, at_once);
}
