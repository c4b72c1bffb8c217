// References in files: what torch wants to find when TorchScript writes or reads one. The other half is
// Reference::fork.

#pragma once

#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

namespace rpc = torch::distributed::rpc;

// torch asks its agent who it is when TorchScript writes or reads a reference, and tells it when one dies. This one
// has nobody to tell.
class SilentAgent final : public rpc::RpcAgent {
 public:
  SilentAgent() : rpc::RpcAgent(rpc::WorkerInfo("farcall", int64_t{32767}), nullptr, std::chrono::milliseconds(0)) {}
  ~SilentAgent() override = default;

  c10::intrusive_ptr<rpc::JitFuture> send(
      const rpc::WorkerInfo&, c10::intrusive_ptr<rpc::Message>, const float, const rpc::DeviceMap&) override {
    auto done = c10::make_intrusive<rpc::JitFuture>(c10::AnyType::get());
    done->markCompleted(c10::IValue());
    return done;
  }
  const rpc::WorkerInfo& getWorkerInfo(const std::string&) const override {
    return workerInfo_;
  }
  const rpc::WorkerInfo& getWorkerInfo(rpc::worker_id_t) const override {
    return workerInfo_;
  }
  std::vector<rpc::WorkerInfo> getWorkerInfos() const override {
    return {workerInfo_};
  }
  void join(bool, float) override {}
  void sync() override {}
  void startImpl() override {}
  void shutdownImpl() override {}
  std::unordered_map<std::string, std::string> getMetrics() override {
    return {};
  }

 private:
  void addGilWaitTime(const std::chrono::microseconds) override {}
};

void allow_pickling(bool allowed) {
  if (allowed) {
    rpc::enableJitRRefPickle();
  } else {
    rpc::disableJitRRefPickle();
  }
}

}  // namespace
