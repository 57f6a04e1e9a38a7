/* What the two floors share: the job every sandbox needs done, in the fewest system calls. */
#ifndef FLOOR_H
#define FLOOR_H

#include <sys/types.h>

enum { MAX_HIERARCHIES = 8 };

/* The job, as given on the command line. */
struct job {
    const char *lower;   /* directory to be the overlay's lowerdir: an image's mount */
    const char *stage;   /* empty directory to mount the writable layer on */
    const char *program; /* the no-op to execute in the new root */
    long id_base;        /* host id of the sandbox's root; 65,536 ids are mapped */
    int hierarchies;     /* parents of the group to make: the first is v2, or absent (-1) */
    int parents[MAX_HIERARCHIES];
};

/* ARGS: LOWER STAGE ID_BASE PROGRAM V2_PARENT|- V1_PARENT... */
void parse_job(struct job *job, char **args);

/* Make a group in every hierarchy, set its limits; the v2 one's fd is returned, or -1. */
int make_groups(const struct job *job);
void remove_groups(const struct job *job);

/* Clone into all new namespaces and the v2 group, join the v1 groups, map the ids. Returns as
 * clone does; the child returns once it is placed and mapped. */
pid_t clone_sandbox(const struct job *job, int v2_group);

/* In the child: tmpfs, overlay, proc, dev and sys, and a root made of them. */
void enter_root(const struct job *job);

/* Commands come on stdin, one count a line. Returns 0 at its end. */
long next_count(void);
double now_ms(void);
void print_sample(double ms);
void end_samples(void);

_Noreturn void die(const char *what);

#endif
