// For two files of Horovod 0.28.1, whose ranks would end by a signal where another one is lost.
#include <mpi.h>
#include <stdexcept>
#include <vector>

// mpi_controller.cc: rank 0 does not look at what these return, and reads what it has not received. Thrown, it becomes
// the error that all other ranks raise.
inline int checked(int code) {
  if (code != MPI_SUCCESS) throw std::runtime_error("a collective of MPI failed");
  return code;
}
#define MPI_Gather(...) checked(MPI_Gather(__VA_ARGS__))
#define MPI_Gatherv(...) checked(MPI_Gatherv(__VA_ARGS__))
#define MPI_Bcast(...) checked(MPI_Bcast(__VA_ARGS__))

// mpi_context.cc: Horovod's thread frees its communicators while another thread tells all communicators of the loss,
// without a lock (Open MPI 5.0.11). So they are freed when Horovod starts again.
inline std::vector<MPI_Comm>& unused() {
  static std::vector<MPI_Comm> communicators;
  return communicators;
}
inline int free_later(MPI_Comm* communicator) {
  unused().push_back(*communicator);
  *communicator = MPI_COMM_NULL;
  return MPI_SUCCESS;
}
inline void free_unused() {
  for (auto& communicator : unused()) MPI_Comm_free(&communicator);
  unused().clear();
}
#define MPI_Comm_free(communicator) free_later(communicator)
#define MPI_Comm_split_type(...) (free_unused(), MPI_Comm_split_type(__VA_ARGS__))
