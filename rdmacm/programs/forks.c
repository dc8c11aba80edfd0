/*
 * Forked children: what they have inherited refuses them, what they make anew works, and whoever is connected to the
 * parent notices its end although a child lives on.
 *
 *     forks
 */
#include <signal.h>
#include <sys/wait.h>

#include <rdma/rdma_verbs.h>

#include "common.h"

static struct rdma_conn_param parameters(void)
{
	return (struct rdma_conn_param){ .responder_resources = 1, .initiator_depth = 1, .retry_count = 7 };
}

/* A connection to who listens, over which a number goes. */
static void talk(struct sockaddr_in to, unsigned number)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_conn_param param = parameters();
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	struct ibv_wc wc;

	CHECK(channel);
	id = resolved(channel, to);
	create_qp(id);
	CHECK((mr = rdma_reg_msgs(id, &number, sizeof(number))));
	CHECK(rdma_connect(id, &param) == 0);
	pass(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(rdma_post_send(id, NULL, &number, sizeof(number), mr, 0) == 0);
	CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(rdma_disconnect(id) == 0);
	pass(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	rdma_destroy_qp(id);
	CHECK(rdma_dereg_mr(mr) == 0);
	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(channel);
}

/* The other side of `talk`. */
static void listen_to(struct rdma_event_channel *channel, unsigned number)
{
	struct rdma_conn_param param = parameters();
	struct rdma_cm_event *event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	struct rdma_cm_id *id = event->id;
	unsigned message = 0;
	struct ibv_mr *mr;
	struct ibv_wc wc;

	CHECK(rdma_ack_cm_event(event) == 0);
	create_qp(id);
	CHECK((mr = rdma_reg_msgs(id, &message, sizeof(message))));
	CHECK(rdma_post_recv(id, NULL, &message, sizeof(message), mr) == 0);
	CHECK(rdma_accept(id, &param) == 0);
	pass(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(message == number);
	pass(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	rdma_destroy_qp(id);
	CHECK(rdma_dereg_mr(mr) == 0);
	CHECK(rdma_destroy_id(id) == 0);
}

static void ended_well(pid_t pid)
{
	int status;

	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

/* A child of one that listens. */
static void child(struct rdma_event_channel *channel, struct rdma_cm_id *listening, struct sockaddr_in to)
{
	struct sockaddr_in own = address_of("127.0.0.1", 0);
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	CHECK(rdma_get_cm_event(channel, &event) == -1 && errno == EINVAL);
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == -1 && errno == EINVAL);
	CHECK(rdma_listen(listening, 1) == -1 && errno == EINVAL);
	CHECK(rdma_bind_addr(listening, (struct sockaddr *)&own) == -1 && errno == EINVAL);
	CHECK(rdma_destroy_id(listening) == 0);
	rdma_destroy_event_channel(channel);
	talk(to, 2);
}

/* One that is connected, leaves a child behind, and dies. */
static void leave(struct sockaddr_in to, int line)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_conn_param param = parameters();
	struct rdma_cm_id *id;
	pid_t pid;

	CHECK(channel);
	id = resolved(channel, to);
	create_qp(id);
	CHECK(rdma_connect(id, &param) == 0);
	pass(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		/* Until the one who was connected has noticed. */
		CHECK(read(line, &(char){ 0 }, 1) == 0);
		_exit(0);
	}
	raise(SIGKILL);
}

static void noticed(struct rdma_event_channel *channel, struct sockaddr_in to)
{
	struct rdma_conn_param param = parameters();
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	int ends[2], status;
	pid_t pid;

	CHECK(pipe(ends) == 0);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		end_with_parent();
		close(ends[1]);
		leave(to, ends[0]);
	}
	close(ends[0]);
	event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	id = event->id;
	CHECK(rdma_ack_cm_event(event) == 0);
	create_qp(id);
	CHECK(rdma_accept(id, &param) == 0);
	pass(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	pass(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	/* Only now the child may end. */
	close(ends[1]);
	CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0);
}

int main(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listening;
	struct sockaddr_in at;
	pid_t pid;

	CHECK(channel && ibv_fork_init() == 0);
	listening = listener(channel, address_of("127.0.0.1", 0));
	at = address_of("127.0.0.1", ntohs(rdma_get_src_port(listening)));
	/* A child before there was any connection, and one after. */
	for (int round = 0; round < 2; round++) {
		pid = fork();
		CHECK(pid >= 0);
		if (pid == 0) {
			end_with_parent();
			child(channel, listening, at);
			_exit(0);
		}
		listen_to(channel, 2);
		ended_well(pid);
	}
	noticed(channel, at);
	/* All of it is as it was. */
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		end_with_parent();
		talk(at, 3);
		_exit(0);
	}
	listen_to(channel, 3);
	ended_well(pid);
	CHECK(rdma_destroy_id(listening) == 0);
	rdma_destroy_event_channel(channel);
	puts("children and parents are apart");
	return 0;
}
