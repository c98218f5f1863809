// Tests the header of payloads under sanitizers.
#include "../kernels/payload.h"

#include <set>

#include "../kernels/sign_sgd_codec.h"
#include "check.h"
#include "fixed_length_support.h"

namespace gradcomp {
namespace {

bool Contains(const Status& status, const std::string& part) {
  return status.message.find(part) != std::string::npos;
}

void PlansDifferWhereAnySettingDoes() {
  const std::vector<std::vector<int64_t>> settings = {
      {}, {0}, {1}, {4, 4}, {4, 5}, {5, 4}, {4, 4, 0}, {4, 0, 4}, {0, 0, 0, 0}, {4, 4, 0, 0, 0}};
  std::set<int64_t> plans;
  for (const auto& of_one : settings) plans.insert(PlanOf(of_one));
  CHECK(plans.size() == settings.size());
}

void AnotherPlanIsRefusedBeforeItsLength() {
  Codecs codecs;
  codecs.push_back(std::make_unique<SignSgdCodec>(70));
  const auto payload = ValidFixed(Method::kSignSgd, codecs);
  Codecs longer;
  longer.push_back(std::make_unique<SignSgdCodec>(7000));
  for (int64_t plan : {kPlan, kPlan + 1}) {
    FixedLengthDecoder decoder(longer, Method::kSignSgd, kFingerprint, plan, Threads(1));
    const Status status = decoder.Read(payload.data(), 1, payload.size(), kStep);
    CHECK(Contains(status, plan == kPlan ? "length of" : "follows another plan"));
    CHECK(Contains(status, "payload of replica 0: "));
  }
}

void AdaCompRefusesOtherBinSizes() {
  Tensors residuals = {Normal(300, 1, 1)};
  const auto payload = Encode<float>(&residuals, Tensors(residuals), {50});
  AdaCompDecoder decoder({{300, 51}}, kFingerprint, Threads(1));
  const Status status = decoder.Read(payload.data(), 1, payload.size(), kStep);
  CHECK(Contains(status, "payload of replica 0: plan "));
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(PlansDifferWhereAnySettingDoes);
  RUN(AnotherPlanIsRefusedBeforeItsLength);
  RUN(AdaCompRefusesOtherBinSizes);
}
