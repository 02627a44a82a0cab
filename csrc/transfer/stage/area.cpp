#include "transfer/stage/area.h"

#include "common/failpoint.h"

namespace torch_mooncake::transfer {

Result<std::shared_ptr<StageArea>> StageArea::create(EngineImpl& engine) {
  constexpr uint64_t kBytes = kStageSlots * kStageSlotBytes;
  auto area = std::make_shared<StageArea>();
  TM_TRY(failpoint("transfer.stage_area"));
  TM_ASSIGN(area->segment, Segment::create("tm-stage", kBytes, kBytes));
  TM_ASSIGN(area->mapping, area->segment->map(Protection::read_write));
  TM_ASSIGN(auto region, engine.register_segment(area->segment, 0, kBytes, {.label = "stage"}));
  area->region = std::static_pointer_cast<RegionImpl>(region);
  return area;
}

}  // namespace torch_mooncake::transfer
