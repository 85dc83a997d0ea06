// Find objects in a picture with a decoded detector and ONNX Runtime:
// onnxruntime_detector FILE.onnx PICTURE [SCORE]
#include <onnxruntime_cxx_api.h>

#include <iostream>

#include "mmcare.hpp"

int detect(const char* file, const char* picture_file, float least) {
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR);
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(1);
  Ort::Session session(env, file, options);
  Ort::AllocatorWithDefaultOptions allocator;
  const auto text = session.GetModelMetadata().LookupCustomMetadataMapAllocated("mmcare", allocator);
  if (!text) throw std::runtime_error("the file does not say what it is");
  const mmcare::json description = mmcare::parse(text.get());
  const mmcare::json& image = description.at("inputs").at(0);

  const std::vector<int64_t> shape = {1, 3, description.at("shape").at(0),
                                      description.at("shape").at(1)};
  const auto info = session.GetInputTypeInfo(0);
  if (info.GetTensorTypeAndShapeInfo().GetShape() != shape)
    throw std::runtime_error("its description is not the file's");

  const cv::Mat picture = cv::imread(picture_file);
  if (picture.empty()) throw std::runtime_error("not a picture");
  mmcare::Place place;
  std::vector<float> planes = mmcare::prepare(picture, description, place);
  std::vector<uint8_t> bytes;
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  Ort::Value input{nullptr};
  if (image.at("dtype") == "uint8") {
    bytes.assign(planes.begin(), planes.end());
    input = Ort::Value::CreateTensor<uint8_t>(memory, bytes.data(), bytes.size(), shape.data(), 4);
  } else {
    input = Ort::Value::CreateTensor<float>(memory, planes.data(), planes.size(), shape.data(), 4);
  }
  const char* input_name = "image";
  const char* names[] = {"boxes", "scores", "labels"};
  const auto outputs = session.Run(Ort::RunOptions{nullptr}, &input_name, &input, 1, names, 3);
  const size_t rows = outputs[1].GetTensorTypeAndShapeInfo().GetElementCount();
  if (outputs[0].GetTensorTypeAndShapeInfo().GetElementCount() != 4 * rows ||
      outputs[2].GetTensorTypeAndShapeInfo().GetElementCount() != rows)
    throw std::runtime_error("boxes, scores and labels do not fit");
  const auto found = mmcare::read_boxes(
      description, outputs[0].GetTensorData<float>(), outputs[1].GetTensorData<float>(),
      outputs[2].GetTensorData<int32_t>(), int(rows), 1, place, picture.size(), least);
  mmcare::print(description, found);
  return 0;
}

int main(int count, char** words) {
  if (count < 3) {
    std::cerr << "usage: " << words[0] << " FILE.onnx PICTURE [SCORE]\n";
    return 2;
  }
  try {
    return detect(words[1], words[2], count > 3 ? std::stof(words[3]) : 0.3f);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 2;
  }
}
