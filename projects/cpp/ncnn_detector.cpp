// Find objects in a picture with a decoded detector and ncnn, in float32:
// ncnn_detector FOLDER.ncnn PICTURE [SCORE]
#include <net.h>

#include <fstream>
#include <iostream>

#include "mmcare.hpp"

int detect(const std::string& folder, const char* picture_file, float least) {
  std::ifstream stream(folder + "/mmcare.json");
  const std::string text((std::istreambuf_iterator<char>(stream)), {});
  const mmcare::json description = mmcare::parse(text);

  ncnn::Net net;
  net.opt.num_threads = 1;
  net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = false;
  if (net.load_param((folder + "/model.ncnn.param").c_str()) ||
      net.load_model((folder + "/model.ncnn.bin").c_str()))
    throw std::runtime_error("ncnn cannot read it");

  const cv::Mat picture = cv::imread(picture_file);
  if (picture.empty()) throw std::runtime_error("not a picture");
  mmcare::Place place;
  const std::vector<float> planes = mmcare::prepare(picture, description, place);
  const int height = description.at("shape").at(0), width = description.at("shape").at(1);
  ncnn::Mat image(width, height, 3);
  for (int c = 0; c < 3; c++)  // there are gaps between its channels
    std::copy_n(planes.data() + size_t(c) * height * width, size_t(height) * width,
                static_cast<float*>(image.channel(c)));

  ncnn::Extractor extractor = net.create_extractor();
  ncnn::Mat boxes, scores;
  if (extractor.input("image", image) || extractor.extract("boxes", boxes) ||
      extractor.extract("scores", scores))
    throw std::runtime_error("the network has no image, boxes and scores");
  if (boxes.dims != 2 || boxes.w != 4 || scores.dims != 2 || scores.h != boxes.h)
    throw std::runtime_error("boxes and scores do not fit");
  // The network leaves NMS to read_boxes.
  const auto found =
      mmcare::read_boxes(description, static_cast<const float*>(boxes),
                         static_cast<const float*>(scores), nullptr, boxes.h, scores.w, place,
                         picture.size(), least);
  mmcare::print(description, found);
  return 0;
}

int main(int count, char** words) {
  if (count < 3) {
    std::cerr << "usage: " << words[0] << " FOLDER.ncnn PICTURE [SCORE]\n";
    return 2;
  }
  try {
    return detect(words[1], words[2], count > 3 ? std::stof(words[3]) : 0.3f);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 2;
  }
}
